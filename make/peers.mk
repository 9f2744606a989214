# Public packages under test, in an environment of their own (.venv-peers):
#   make peers && pytest conformance/ --adapter nemo_automodel --adapter-python .venv-peers
PEERS := .venv-peers

.PHONY: peers
peers: $(PEERS)/.stamp

$(PEERS)/.stamp: requirements/peers-base.txt requirements/peers.txt
	test -x $(PEERS)/bin/python || python3 -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -r requirements/peers-base.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps -r requirements/peers.txt
	HF_HUB_OFFLINE=1 $(PEERS)/bin/python -c "import nemo_automodel, speculators, torchao, gfloat"
	touch $@
