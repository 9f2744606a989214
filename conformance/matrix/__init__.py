"""Every public package under test, stage by stage: the table, its environments, the runs and MATRIX.md."""
