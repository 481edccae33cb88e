import device_host
import pytest

from kernels import codec


@pytest.fixture(params=["avx2", "portable", "numpy"])
def backend(request):
    if request.param not in codec.available_backends():
        pytest.skip(f"{request.param} can't run here")
    return request.param


@pytest.fixture(params=["nvfp4", "mxfp4", "fp8"])
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def host_kernels(request):
    """The device kernels' bodies, run on the host."""
    if not device_host.has_compiler():
        pytest.skip("needs g++ to run the device kernels' bodies on the host")
    return device_host.build(request.config.cache.mkdir("device-kernels"))
