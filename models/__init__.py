"""The nets: one net, one file, each a function that returns a `torch.nn.Module`; this file holds no code.

Not here: weights, training, windows. A net's file needs torch alone, so a net of your own is such a file too.
A net maps float32 (n, c, z, y, x) to (n, C, z * scale, y * scale, x * scale), for every window that is a
multiple of its stride, and says in its attribute `volpipe`, in voxels of its input and in the order z, y, x:

    in_channels, out_channels   c and C
    scale           output voxels per input voxel
    stride          what window, halo and grid origin are multiples of: the net's total downsampling
    halo            how many voxels past its own an output voxel sees, exactly; not rounded up to the stride
    tile_invariant  False if an output voxel depends on the whole window, as with instance norm
    intensity       "same": in the units of the normalised input; "unit": 0 to 1, a probability; or "raw"
    window          a window that serves well where nothing else is known
"""
