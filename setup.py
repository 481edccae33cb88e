"""The one thing pyproject.toml can't say yet: an extension that may fail to build.

Without a compiler the install goes on and `kernels` runs its NumPy path, and says so.
"""

from setuptools import Extension, setup

HEADERS = ("records", "records_portable", "records_avx2")

setup(
    ext_modules=[
        Extension(
            "kernels._records",
            sources=["kernels/csrc/records_module.cpp"],
            depends=[f"kernels/csrc/{name}.h" for name in HEADERS],
            include_dirs=["kernels/csrc"],
            # Every rounding is the source's: nothing may be contracted. The others only permit
            # faster code of the same results.
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-Wall",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
            ],
            language="c++",
            optional=True,
        )
    ]
)
