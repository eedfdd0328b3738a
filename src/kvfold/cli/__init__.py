"""One file per command. Torch and transformers are imported when a command runs, not before."""
