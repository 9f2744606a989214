# Whether any verdict, blame or ratio of the suite changed since a revision: five minutes on two cores, and five more the
# first time that a revision is named. What each said is kept in build/verdicts.
#   make same-verdicts [BASE=HEAD~1]
BASE ?= HEAD~1

.PHONY: same-verdicts
same-verdicts: $(VENV)/.installed
	$(VENV)/bin/python -m draftconf.conformance.evidence.same_verdicts since $(BASE)
