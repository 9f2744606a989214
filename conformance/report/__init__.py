"""The results of a run and their renderings. Nothing here decides anything."""
