"""What weights are: tensors as bits, their names and shapes, which bits changed, and the digest of a whole state.

`bits` views a tensor or an array as unsigned integers; `layout` views a whole model so, under the `names` that its
wrappers hide; `memory` tells live tensors from copies and notices when they are other ones; `segments` cuts a tensor
into the units that are coded independently; `changes` finds the elements whose bits differ; `digests` computes the
fingerprint; `casts` names the dtypes that weights can be cast to. Nothing here reads a file, codes a byte or knows of
versions.
"""
