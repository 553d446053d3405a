"""The layers that are split over the vocabulary: embedding, head, entropy."""
