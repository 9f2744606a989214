"""Root of a checkout: loads the suite's plugin (and pytester, with which tests/ runs it)."""

pytest_plugins = ["draftconf.conformance.plugin", "pytester"]
