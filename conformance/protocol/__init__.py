"""What an adapter says and how it is called: its description, its methods, the process that it runs in."""
