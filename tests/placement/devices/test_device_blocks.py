"""Blocks of devices that no mesh divides: meshes as sets of devices say the same."""

from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.devices.blocks import blocks_of, covers
from prefect_rlhf.placement.devices.mesh import DeviceMesh

WHOLE = st.builds(lambda first, count: DeviceMesh(first, count, 0, 8), st.integers(0, 5), st.integers(1, 3))
SLICE = st.builds(
    lambda node, width, place: DeviceMesh(node, 1, place % (8 // width) * width, width),
    st.integers(0, 7),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 7),
)
MESHES = st.lists(WHOLE | SLICE, min_size=1, max_size=6)


@given(MESHES)
def test_blocks_are_the_devices_of_a_mesh_and_no_mesh_divides_them(meshes):
    for mesh, blocks in blocks_of(meshes).items():
        devices = [device for block in blocks for device in block.devices()]
        assert sorted(devices) == sorted(mesh.devices())
        assert list(blocks) == sorted(blocks, key=lambda block: block.devices()[0])
        for block in blocks:
            assert all(set(block.devices()) <= set(m.devices()) or not m.overlaps(block) for m in meshes)


@given(MESHES, WHOLE | SLICE)
def test_meshes_cover_a_mesh_if_some_of_them_have_each_of_its_devices(meshes, mesh):
    there = {device for each in meshes for device in each.devices()}
    assert covers(meshes, mesh) == (set(mesh.devices()) <= there)
