#!/bin/sh
# Create the virtual environments of the peers: benchmarks/peers/setup.sh FOLDER [PYTHON]
# Each peer has its own, because tuned-lens needs an old transformers and TransformerLens a new one. Every line pins
# torch: pip would otherwise install the newest version, with GPU libraries.
set -eu
folder=${1:?expected the folder for the environments}
python=${2:-python3}
mkdir -p "$folder"

"$python" -m venv "$folder/tuned_lens"
"$folder/tuned_lens/bin/pip" install torch==2.13.0
"$folder/tuned_lens/bin/pip" install torch==2.13.0 tuned-lens==0.2.0 transformers==4.46.3 datasets==3.2.0 \
    "huggingface_hub<1.0" "plotly<6" "numpy<2.3"
# Its training code imports a module that newer versions of torchdata no longer have.
"$folder/tuned_lens/bin/pip" install --no-deps torchdata==0.9.0

"$python" -m venv "$folder/jacobian"
"$folder/jacobian/bin/pip" install torch==2.13.0
"$folder/jacobian/bin/pip" install torch==2.13.0 transformer-lens==4.3.0
