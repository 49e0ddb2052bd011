#!/usr/bin/env bash
# Installs the packages that benchmarks compare with into a new environment, by default in the folder `peers`:
#
#     tests/benchmarks/install_peers.sh [FOLDER]
#     python tests/benchmarks/run.py --peers-python FOLDER/bin/python
#
# The extra `peers` in setup.py has the versions, except that of FFCV, which is compiled in the finished environment. On
# Debian and Ubuntu, this needs the packages g++, pkg-config, libopencv-dev and libturbojpeg0-dev, which are only
# installed if the script runs as root. A package that cannot be installed does not stop the others: its error is printed
# at the end, and the script then ends with status 1.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-peers}
errors=()

if ! { command -v g++ && pkg-config --exists opencv4 libturbojpeg; } &>/dev/null && ((EUID == 0)); then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
        g++ pkg-config libopencv-dev libturbojpeg0-dev >/dev/null
fi
python3 -m venv "$folder" || exit
echo "*" >"$folder/.gitignore"
export PIP_DISABLE_PIP_VERSION_CHECK=1

install() {
    local output
    echo "+ pip install $*"
    output=$("$folder/bin/python" -m pip install "$@" 2>&1) && return
    errors+=("pip install $*:" "$(tail -n 20 <<<"$output")")
    return 1
}

if ! install -e "$root[peers]"; then
    # pip installs all packages or none, so try them one by one.
    errors=()
    install -e "$root"
    names='print(*(one.partition(";")[0] for one in requires("colabkit") if "peers" in one))'
    for pin in $("$folder/bin/python" -c "from importlib.metadata import requires; $names"); do
        install "$pin"
    done
fi
install setuptools wheel
install --no-build-isolation ffcv==1.0.2

if ((${#errors[@]})); then
    printf '%s\n' "" "These packages could not be installed:" "${errors[@]}" >&2
    exit 1
fi
