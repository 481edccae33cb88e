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
