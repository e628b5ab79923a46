#!/bin/sh
# Collect all that rollflow needs as wheels in one folder, for machines that reach no registry:
#
#     infra/wheelhouse.sh cpu wheelhouse     # or gpu; run on a machine with Python 3.11 that reaches one
#     wheelhouse/install.sh .venv            # on the other machine, which needs Python 3.11 alone
#
# The folder serves the Dockerfile, too (see its head).
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
# Wheels of everything, also of what the registry has as source only; then rollflow itself.
$pip wheel --no-deps --wheel-dir "$folder" --requirement "$folder/pins.txt"
$pip wheel --no-deps --wheel-dir "$folder" "$here/.."
cat > "$folder/install.sh" <<'INSTALL'
#!/bin/sh
# install.sh FOLDER: rollflow in a virtual environment, from the wheels beside this file.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3.11}" -m venv "$1"
"$1/bin/pip" install --disable-pip-version-check --no-index --no-deps --find-links "$here" --requirement "$here/pins.txt"
"$1/bin/pip" install --disable-pip-version-check --no-index --no-deps "$here"/rollflow-*.whl
INSTALL
chmod +x "$folder/install.sh"
(cd "$folder" && sha256sum -- *.whl > SHA256SUMS)
echo "$(find "$folder" -name '*.whl' | wc -l) wheels in $folder; copy it, check it with sha256sum -c SHA256SUMS, run install.sh"
