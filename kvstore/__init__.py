"""Tiered KV-cache storage for DeepSeek-V4.1-Flash."""
