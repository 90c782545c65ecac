#!/usr/bin/env bash
# Environments of the libraries that evaluate.py compares with: setup.sh [torchrec] [tf] [horovod], or all.
# They go to $PEERS (default ~/.cache/peers). Horovod is built from its source release, which takes some minutes and
# needs g++ and cmake.
set -euo pipefail
folder=${PEERS:-$HOME/.cache/peers}
mkdir -p "$folder"

environment() { # NAME: made anew, unless it is there; `pip` is its own from here on
    [ -d "$folder/$1" ] || "${PYTHON:-python3}" -m venv "$folder/$1"
    pip="nice -n 10 $folder/$1/bin/python -m pip --disable-pip-version-check --quiet"
}

torchrec() {
    environment torchrec
    $pip install torch==2.13.0 numpy
    # Without dependencies: torchrec asks for fbgemm-gpu, of which fbgemm-gpu-cpu is the build for CPUs.
    $pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
    $pip install iopath pyre-extensions torchmetrics==1.0.3 tqdm tensordict
}

tf() {
    environment tf
    $pip install tensorflow-cpu==2.21.0
}

horovod() {
    environment horovod
    $pip install torch==2.13.0 numpy "setuptools<80" wheel packaging pyyaml psutil cloudpickle cffi
    local source
    source=$(mktemp -d)
    $pip download --no-deps --no-binary :all: --no-build-isolation -d "$source" horovod==0.28.1
    tar xzf "$source/horovod-0.28.1.tar.gz" -C "$source"
    cd "$source/horovod-0.28.1"
    # torch 2.13 needs C++20. And the group that carries all collectives forgets the interface that it was told, so that
    # ranks on different machines try 127.0.0.1.
    sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' CMakeLists.txt horovod/torch/CMakeLists.txt
    sed -i '/::InitializeForProcessSet(/,/device_attr.iface = /s/^\( *\)attr device_attr;/\1gloo_iface_ = global_context.gloo_iface_;\n&/' \
        horovod/common/gloo/gloo_context.cc
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO MAKEFLAGS=-j2 PATH="$folder/horovod/bin:$PATH" \
        nice -n 10 python setup.py bdist_wheel >"$folder/horovod_build.log" 2>&1 ||
        { tail -n 20 "$folder/horovod_build.log"; exit 1; }
    $pip install --no-deps --no-index dist/horovod-0.28.1-*.whl
    cd / && rm -rf "$source"
}

for peer in "${@:-torchrec tf horovod}"; do
    for name in $peer; do # the default is one word
        "$name"
        echo "$folder/$name is ready"
    done
done
