"""Memory that ncnn's runs take and give back, shared by all nets.

A net's own pool keeps the buffers of its largest run: 10 GB over 149 graphs.
"""

import ncnn

_BLOBS, _WORKSPACE = ncnn.PoolAllocator(), ncnn.PoolAllocator()


def new_extractor(net: ncnn.Net) -> ncnn.Extractor:
    """An extractor of a net over the shared pools."""
    extractor = net.create_extractor()
    extractor.set_blob_allocator(_BLOBS)
    extractor.set_workspace_allocator(_WORKSPACE)
    return extractor


def drop_buffers() -> None:
    """Let go of the buffers of past runs: those of another length do not fit the next run's."""
    _BLOBS.clear()
    _WORKSPACE.clear()
