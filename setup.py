"""The one thing pyproject.toml can't say yet: an extension that may fail to build.

Without a compiler the install goes on and `kernels` runs its NumPy path, and says so.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kernels._records",
            sources=["kernels/csrc/records_module.cpp"],
            depends=["kernels/csrc/records.h"],
            include_dirs=["kernels/csrc"],
            extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=off"],
            language="c++",
            optional=True,
        )
    ]
)
