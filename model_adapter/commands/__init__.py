"""One module per command of `ds41f`; `model_adapter.cli` puts them together."""
