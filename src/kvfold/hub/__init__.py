"""Models and checkpoints on disk and on the Hugging Face Hub: load, save, convert, describe."""
