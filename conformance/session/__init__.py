"""A run of the suite inside pytest: planning, running and concluding it, on what one process knows of it."""
