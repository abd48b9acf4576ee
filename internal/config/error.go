package config

import (
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	File    string // as it was named to Load or Parse
	Line    int    // 0 if the problem has no place in the file
	Field   string // path of the field, "front.tls.certFile"; "" if the problem is not about a field
	Message string
}

// String is "file:line: field: message", the form that editors can jump to.
func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d", p.Line)
	}
	b.WriteString(": ")
	if p.Field != "" {
		b.WriteString(p.Field + ": ")
	}
	b.WriteString(p.Message)
	return b.String()
}

// Error is everything that is wrong with a configuration, by line.
type Error struct {
	Problems []Problem
}

// Error has one line for each problem.
func (e *Error) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// source remembers where in the file the fields of a Config came from, and what is wrong with them.
type source struct {
	file     string
	lines    map[string]int  // line by path; a section's is that of its name
	visited  map[string]bool // sections that decode read
	bad      map[string]bool // paths with a problem; nothing more is said about them
	problems []Problem
}

// line is where the field is, or else the section that it should be in.
func (s *source) line(path string) int {
	for {
		if n, ok := s.lines[path]; ok {
			return n
		}
		i := strings.LastIndexAny(path, ".[")
		if i < 0 {
			return s.lines[""]
		}
		path = path[:i]
	}
}

// report notes a problem with the field, unless it has one already.
func (s *source) report(path, format string, args ...any) {
	if s.bad[path] {
		return
	}
	s.reportAt(s.line(path), path, format, args...)
}

func (s *source) reportAt(line int, path, format string, args ...any) {
	if s.bad == nil {
		s.bad = map[string]bool{}
	}
	s.bad[path] = true
	s.problems = append(s.problems, Problem{s.file, line, path, fmt.Sprintf(format, args...)})
}

// good reports whether all fields are free of problems, so that they can be compared with each other.
func (s *source) good(paths ...string) bool {
	return !slices.ContainsFunc(paths, func(p string) bool { return s.bad[p] })
}

// err is the *Error of all problems, nil if there are none.
func (s *source) err() error {
	if len(s.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(s.problems, func(a, b Problem) int { return a.Line - b.Line })
	return &Error{Problems: s.problems}
}
