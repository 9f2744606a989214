"""Built-in adapters. Each file is one; its attribute ``adapter`` is what ``--adapter FILE`` loads."""
