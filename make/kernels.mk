# The Triton kernels through Triton's interpreter, no GPU needed: their own tests, then the suite's checks of the loss
# and the MX formats. In an environment of their own (.venv-kernels), because Triton takes 1 GB.
KERNELS := .venv-kernels
TRITON := 3.9.0
KERNEL_STAGES := lk_loss,mxfp4,mxfp8,mxfp4_decode,mxfp8_decode,fake_mxfp4,fake_mxfp8

.PHONY: kernels-test
kernels-test: $(KERNELS)/.installed
	TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest tests/fast/test_kernels.py $(PYTEST_FLAGS)
	TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest conformance/ --adapter conformance/adapters/fast.py:triton \
		--stage $(KERNEL_STAGES) $(PYTEST_FLAGS)

$(KERNELS)/.installed: constraints.txt
	test -x $(KERNELS)/bin/python || $(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m pip install --quiet -r constraints.txt triton==$(TRITON)
	touch $@
