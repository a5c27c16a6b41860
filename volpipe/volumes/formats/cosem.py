"""The COSEM dialect: `transform` {axes, scale, translate, units} of an array, and `multiscales` of a group.

Not here: everything else that N5 and Zarr v2 attributes say (n5, zarr). Unlike N5's own lists these follow their
`axes`, in practice (z, y, x). Schema: github.com/janelia-cosem/schemas, multiscale.md.
"""

from __future__ import annotations

from volpipe.volumes.storage.metadata import Level, Multiscale, Place, Tree, floats, listed_place, plain


def read_place(transform: object) -> Place | None:
    """Return the place in the attribute `transform`, None where it has none."""
    if not isinstance(transform, dict) or not isinstance(transform.get("axes"), list):
        return None
    axes = [str(name).lower() for name in transform["axes"]]
    scale = floats(transform.get("scale"))
    if scale is None or len(scale) != len(axes):
        return None
    return listed_place(axes, scale, transform.get("translate"), transform.get("units"))


def transform(multiscale: Multiscale, level: Level) -> Tree:
    """Return the `transform` of the array of `level`."""
    return plain(
        {
            "axes": multiscale.axes,
            "scale": multiscale.scale(level),
            "translate": multiscale.shift(level),
            "units": ["nm" if axis in "zyx" else "" for axis in multiscale.axes],
        }
    )


def multiscale(group: Multiscale) -> Tree:
    """Return the one entry of the `multiscales` of a group."""
    datasets: list[Tree] = [{"path": level.key} for level in group.levels]
    if group.voxel_size_nm is not None:
        for dataset, level in zip(datasets, group.levels, strict=True):
            dataset["transform"] = transform(group, level)
    return {"name": group.name, "datasets": datasets}
