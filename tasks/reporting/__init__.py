"""What a person sees of a run: artifacts, metrics, predicted beside measured."""
