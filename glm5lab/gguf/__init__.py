"""Layer 1, the file: GGUF shards read into one tensor table, configuration and tokenizer."""
