"""Plans how many dimensions and bits every layer and head gets."""
