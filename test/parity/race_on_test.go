//go:build race

package parity_test

const raceDetector = true
