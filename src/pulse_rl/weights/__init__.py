"""What weights are: tensors as bits, in pieces, their names and shapes, which bits changed, and the digest of a state.

`bits` views a tensor or an array as unsigned integers; `boxes` says which part of a tensor something is, `box_sets`
finds and cuts many of them, and `pieces` says which parts this process holds; `dtensor` finds those of torch's sharded
tensors, and `computed` stands for a tensor that is made when it is read. `layout` views a whole model so, under the
`names` that its wrappers hide; `memory` tells live tensors from copies and notices when they are other ones; `segments`
cuts a tensor into runs; `changes` finds the elements whose bits differ; `digests` computes the fingerprint; `casts`
names the dtypes of casts.
Nothing here reads a file, codes a byte or knows of versions.
"""
