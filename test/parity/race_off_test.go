//go:build !race

package parity_test

const raceDetector = false
