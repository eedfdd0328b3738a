"""What kvfold implements and does not recommend: registries load it by name, and nothing else
imports it."""
