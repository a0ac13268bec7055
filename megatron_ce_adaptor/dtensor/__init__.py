"""Cross entropy of vocabulary-parallel logits that are DTensors, and of plain shards with their group.

`context` holds the `loss_parallel` context and what it does to PyTorch's functions; `loss` the direct API
and its reductions; `gather` the gather for evaluation; `layout` the rules for meshes and placements;
`chunked_shard` which columns a rank holds. The arrows: context -> loss, gather -> layout -> chunked_shard.
"""
