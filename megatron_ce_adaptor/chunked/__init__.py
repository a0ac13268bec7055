"""Output layer and cross entropy in token chunks: the logits of the whole batch never exist.

`wrapper` is the door, `ChunkedLossWrapper`. `heads` and `dtensor_head` say what this rank computes for an
output layer, `module_call` runs it inside of the layer's hooks. `linear_loss` is the differentiable core on
plain tensors, `walk` its loop over the chunks, `foresight` whether gradients computed ahead are right,
`exchange` what happens between tensor-parallel ranks, `scaling` the multiplication by the upstream scale.
"""
