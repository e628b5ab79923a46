#!/bin/sh
# Collects rollflow and all its requirements as wheels in one folder, for machines that reach no package registry:
#
#     infra/wheelhouse.sh cpu wheelhouse     # or gpu; on a machine with Python 3.11 that reaches a registry
#     wheelhouse/install.sh .venv            # on the other machine, which needs only Python 3.11
#
# The Dockerfile can also install from the folder (see its first lines).
set -eu
kind=${1:?which kind? infra/wheelhouse.sh cpu|gpu FOLDER}
folder=${2:?which folder? infra/wheelhouse.sh cpu|gpu FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
pip="${PYTHON:-python3.11} -m pip --disable-pip-version-check"
mkdir -p "$folder"
cp "$here/constraints-$kind.txt" "$folder/pins.txt"
cat "$here/constraints-build.txt" >> "$folder/pins.txt"
if [ "$kind" = cpu ]; then # the CPU build of torch
  export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
fi
# First wheels of all pinned packages, also of those that the registry has only as source; then a wheel of rollflow.
$pip wheel --no-deps --wheel-dir "$folder" --requirement "$folder/pins.txt"
$pip wheel --no-deps --wheel-dir "$folder" "$here/.."
cat > "$folder/install.sh" <<'INSTALL'
#!/bin/sh
# install.sh FOLDER installs rollflow into a new virtual environment, from the wheels in the folder of this file.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3.11}" -m venv "$1"
"$1/bin/pip" install --disable-pip-version-check --no-index --no-deps --find-links "$here" --requirement "$here/pins.txt"
"$1/bin/pip" install --disable-pip-version-check --no-index --no-deps "$here"/rollflow-*.whl
INSTALL
chmod +x "$folder/install.sh"
(cd "$folder" && sha256sum -- *.whl > SHA256SUMS)
echo "$(find "$folder" -name '*.whl' | wc -l) wheels in $folder; copy it, check it with sha256sum -c SHA256SUMS, run install.sh"
