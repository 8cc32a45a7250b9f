#!/usr/bin/env bash
# Runs one training job on two "nodes" of this machine: two network namespaces with addresses of their own, joined by a pair of
# virtual cables, and one torchrun agent in each.
#
#     tests/distributed/two_nodes.sh PYTHON SCRIPT [ARGUMENTS...]
#
# Both agents start SCRIPT once. Needs root and iproute2. Exit code: the first agent's that failed, 0 when both succeeded, 77
# where namespaces cannot be made.
set -euo pipefail
python=$1
shift

name="mmdet$$"
first=10.213.77.1 second=10.213.77.2
agents=()

cleanup() {
  for pid in "${agents[@]:-}"; do [ -z "$pid" ] || kill -9 -- "-$pid" 2>/dev/null || true; done
  ip netns del "${name}a" 2>/dev/null || true
  ip netns del "${name}b" 2>/dev/null || true
}
trap cleanup EXIT

make_nodes() {
  ip netns add "${name}a" && ip netns add "${name}b" &&
    ip link add "${name}v" netns "${name}a" type veth peer name "${name}w" netns "${name}b" &&
    ip -n "${name}a" addr add "$first/24" dev "${name}v" && ip -n "${name}a" link set "${name}v" up &&
    ip -n "${name}b" addr add "$second/24" dev "${name}w" && ip -n "${name}b" link set "${name}w" up &&
    ip -n "${name}a" link set lo up && ip -n "${name}b" link set lo up
}
make_nodes || { echo "two_nodes.sh: network namespaces cannot be made here" >&2; exit 77; }

# $1 namespace, $2 its network card, $3 its address, $4 whether the agents meet there; the rest is the job.
# (An agent finds out by itself where the host's name resolves to the endpoint's address; two namespaces share one name.)
start_agent() {
  local space=$1 card=$2 address=$3 is_host=$4
  shift 4
  setsid ip netns exec "$space" env GLOO_SOCKET_IFNAME="$card" "$python" -m torch.distributed.run \
    --nnodes=2 --nproc-per-node=1 --rdzv-id="$name" --rdzv-backend=c10d --rdzv-endpoint="$first:29417" \
    --rdzv-conf="is_host=$is_host" --local-addr="$address" "$@" &
  agents+=($!)
}
start_agent "${name}a" "${name}v" "$first" 1 "$@"
start_agent "${name}b" "${name}w" "$second" 0 "$@"

code=0
for pid in "${agents[@]}"; do
  wait "$pid" || code=$?
done
exit "$code"
