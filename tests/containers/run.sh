#!/usr/bin/env bash
# What an image has to do in a container that allows little: tests/containers/run.sh IMAGE MODEL
#
#   IMAGE   built from docker/Dockerfile.cpu
#   MODEL   a folder with safetensors in float32, of a hundred megabytes or more; it is mounted read-only
#
#   ENGINE="podman"       docker, unless told otherwise; may have options of its own
#   RUN_ARGS="--ulimit …" more arguments of each run
#
# Ends with 1 if anything is not as it should be. The containers are removed, however it ends.
set -uo pipefail

image=${1:?IMAGE is missing} model=$(realpath "${2:?MODEL is missing}")
read -ra engine <<<"${ENGINE:-docker}"
read -ra run_args <<<"${RUN_ARGS:-}"
name=headrace-check-$$
failures=0

remove() { "${engine[@]}" rm --force "$name" >/dev/null 2>&1; }
trap remove EXIT

tell() { # tell WHAT 0|1
  echo "$([ "$2" = 0 ] && echo ok || echo FAILED): $1"
  [ "$2" = 0 ] || failures=1
}

start() { # start ARGUMENTS of run
  remove
  "${engine[@]}" run --detach --name "$name" --read-only --tmpfs /tmp --cap-drop ALL --network none \
    --env HEADRACE_INSECURE=true --volume "$model:/model:ro" "${run_args[@]}" "$@" >/dev/null
}

is_running() { [ "$("${engine[@]}" inspect --format '{{.State.Running}}' "$name")" = true ]; }

until_healthy() {
  for _ in $(seq 120); do
    "${engine[@]}" exec "$name" headrace health >/dev/null 2>&1 && return 0
    is_running || return 1
    sleep 1
  done
  return 1
}

exit_code() { "${engine[@]}" inspect --format '{{.State.ExitCode}}' "$name"; }

for user in 10001 12345:0 12345:12345; do
  start --user "$user" --entrypoint '["env","-u","HOME","headrace"]' "$image" serve --model /model
  until_healthy
  tell "user $user, no HOME, no capabilities, no network, read-only root: serves" $?
  answer=$("${engine[@]}" exec "$name" headrace generate "Name a river." --max-tokens 8 --temperature 0)
  [ -n "$answer" ]
  tell "user $user: answers" $?
  written=$("${engine[@]}" diff "$name" | grep -cvE '^(C /etc|A /model|C /run|A /run/.*)$')
  [ "$written" = 0 ]
  tell "user $user: writes nothing but to /tmp and its volume" $?
  "${engine[@]}" stop --time 60 "$name" >/dev/null 2>&1
  [ "$(exit_code)" = 0 ]
  tell "user $user: ends in order" $?
done

bytes=$(cat "$model"/*.safetensors | wc -c)
for percent in 100 120; do
  limit=$((bytes * percent / 100))
  start --memory $limit --memory-swap $limit "$image" serve --model /model --threads 1
  "${engine[@]}" wait "$name" >/dev/null
  [ "$(exit_code)" = 2 ] && "${engine[@]}" logs "$name" 2>&1 | grep -qE '^headrace: .* GiB are free'
  tell "$percent % of the weights' memory: refused with numbers, not killed" $?
done
limit=$((bytes * 3))
start --memory $limit --memory-swap $limit "$image" serve --model /model --threads 1
until_healthy
tell "300 %: serves" $?
prompt=$("${engine[@]}" exec "$name" sh -c 'yes mill | head -400 | tr "\n" " "')
# One client, as it takes its memory of the same limit.
"${engine[@]}" exec "$name" headrace generate "$prompt" --raw --n 16 --max-tokens 8 --prompt-logprobs 64 >/dev/null
tell "300 %: answers sixteen times at once, with as many logprobs of a long prompt as there are" $?
is_running && "${engine[@]}" exec "$name" headrace health >/dev/null
tell "300 %: is still there" $?
exit $failures
