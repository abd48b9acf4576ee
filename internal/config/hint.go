package config

import (
	"fmt"
	"reflect"
	"strings"
)

// unknown is the message about a field that the section does not have: what was probably meant, or else what there is.
func unknown(t reflect.Type, path, name string) string {
	if name == "<<" {
		return "merge keys are not supported"
	}
	var known []string
	best, distance := "", 1+max(1, len(name)/3)
	for f := range t.Fields() {
		if !f.IsExported() {
			continue
		}
		field := f.Tag.Get("yaml")
		known = append(known, field)
		if d := edits(strings.ToLower(name), strings.ToLower(field)); d < distance {
			best, distance = field, d
		}
	}
	if best != "" {
		return fmt.Sprintf("unknown field, did you mean %s?", join(path, best))
	}
	// The right field in the wrong section is the other common mistake.
	if elsewhere := find(reflect.TypeFor[Config](), "", name); len(elsewhere) == 1 {
		return fmt.Sprintf("unknown field, did you mean %s?", elsewhere[0])
	}
	return "unknown field, known here: " + strings.Join(known, ", ")
}

// find lists the paths of all fields of that name, whatever the case.
func find(t reflect.Type, path, name string) []string {
	var out []string
	for f := range t.Fields() {
		if !f.IsExported() {
			continue
		}
		p := join(path, f.Tag.Get("yaml"))
		if strings.EqualFold(f.Tag.Get("yaml"), name) {
			out = append(out, p)
		}
		if f.Type.Kind() == reflect.Struct {
			out = append(out, find(f.Type, p, name)...)
		}
	}
	return out
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
