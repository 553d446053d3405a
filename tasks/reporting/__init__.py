"""The reports of a run to a person: artifacts, metrics, predicted beside measured."""
