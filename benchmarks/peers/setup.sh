#!/bin/sh
# Make the peers' virtual environments: benchmarks/peers/setup.sh FOLDER [PYTHON]
# Each has its own, because tuned-lens needs an old transformers and TransformerLens a new one. torch is named in every
# line: pip would otherwise take the newest, with a GPU's libraries.
set -eu
folder=${1:?give the folder to put the environments into}
python=${2:-python3}
mkdir -p "$folder"

"$python" -m venv "$folder/tuned_lens"
"$folder/tuned_lens/bin/pip" install torch==2.13.0
"$folder/tuned_lens/bin/pip" install torch==2.13.0 tuned-lens==0.2.0 transformers==4.46.3 datasets==3.2.0 \
    "huggingface_hub<1.0" "plotly<6" "numpy<2.3"
# Its training code imports a module that newer versions have dropped.
"$folder/tuned_lens/bin/pip" install --no-deps torchdata==0.9.0

"$python" -m venv "$folder/jacobian"
"$folder/jacobian/bin/pip" install torch==2.13.0
"$folder/jacobian/bin/pip" install torch==2.13.0 transformer-lens==4.3.0
