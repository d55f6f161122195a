"""The model: a folder of weights and a tokenizer, made into token ids and logits.

Used by the engine, the gateway (its tokenizer only) and the command line; it knows nothing of
requests, ranks or the pool. Begin with `resolve.resolve_model`, `config.load_config`,
`forward.load_model` and `tokenizer.load_tokenizer`: each module loads what it needs, so that a process
which only tokenises never imports torch. Explained in docs/explain/model.md.
"""
