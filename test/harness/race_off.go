//go:build linux && !race

package harness

const raceEnabled = false
