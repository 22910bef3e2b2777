#!/bin/bash
# A wrapper as users write them: it sets a variable, and runs the program as a child in the foreground.
export PROGRAM_NOTE="set by run.sh"
program=$1
shift
python "$(dirname "$0")/$program" "$@"
