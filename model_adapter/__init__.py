"""DeepSeek-V4.1-Flash in PyTorch, its caches kept in a kvstore."""
