"""FP4 and FP8 record codecs."""
