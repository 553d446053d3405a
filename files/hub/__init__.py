"""The Hugging Face Hub: names of models and datasets, their commits, and copies in the Hub's own cache."""
