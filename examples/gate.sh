#!/bin/sh
# Shard an adapter, verify the shards, publish them. Each step stops the script unless it exits 0.
#
#   TP=4 EP=2 examples/gate.sh ./my-adapter me/my-adapter-tp4-ep2
#
# SHARD, VERIFY and PUBLISH hold further options of each step: SHARD="--base ./base" where the
# adapter's config names a base that is not here; VERIFY="--random-base" needs no weights of it,
# VERIFY="--strict" also stops at signs that the adapter itself is damaged.
set -eu
adapter=$1
repo=$2
# shellcheck disable=SC2086  # split at blanks on purpose
moelora shard "$adapter" --tp "${TP:-4}" --ep "${EP:-2}" --strict ${SHARD:-} -o shards
# shellcheck disable=SC2086
moelora verify shards --adapter "$adapter" --json --junit-xml verify.xml --html verify.html \
  ${VERIFY:-} > verify.json
# shellcheck disable=SC2086
moelora publish shards "$repo" --report verify.json ${PUBLISH:-}
