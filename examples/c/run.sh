#!/bin/sh
# run.sh PROGRAM DIR RESULTS: answer every vector that the program offers.
set -eu
for method in lk_loss mxfp4 mxfp4_decode fake_mxfp4; do
    mkdir -p "$3/$method"
    for input in "$2/inputs/$method"/*.safetensors; do
        "$1" "$method" "$input" "$3/$method/${input##*/}"
    done
done
