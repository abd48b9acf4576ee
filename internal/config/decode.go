package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/mvp-mesh/mvp-node/internal/route"
)

// decode reads the document into c and notes what does not fit. yaml.Unmarshal would stop short of that: it names Go types
// instead of fields and cannot say what was meant.
func decode(data []byte, c *Config) {
	s := &c.src
	s.lines[""] = 1
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		s.reportAt(0, "", "the file is empty")
		return
	} else if err != nil {
		s.reportSyntax(err)
		return
	}
	var next yaml.Node
	if err := dec.Decode(&next); err == nil {
		s.reportAt(next.Content[0].Line, "", "a second document begins here, only one is read")
	} else if !errors.Is(err, io.EOF) {
		s.reportSyntax(err)
	}
	root := doc.Content[0]
	s.lines[""] = root.Line
	if root.Kind != yaml.MappingNode {
		s.reportAt(root.Line, "", "must be a mapping of fields, is %s", describe(root))
		return
	}
	if s.checkSchema(root) {
		s.mapping(root, reflect.ValueOf(c).Elem(), "")
	}
}

// checkSchema reports an apiVersion or kind that is not ours. Nothing else is worth saying about such a file.
func (s *source) checkSchema(root *yaml.Node) bool {
	ok := true
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], resolve(root.Content[i+1])
		if value.Kind != yaml.ScalarNode {
			continue // a wrong type, reported with the others
		}
		for _, want := range []struct{ field, value string }{{"apiVersion", APIVersion}, {"kind", Kind}} {
			if key.Value == want.field && value.Value != want.value && value.ShortTag() == "!!str" {
				s.reportAt(value.Line, want.field, "%q is not known to this mvp-node, which reads %q", value.Value, want.value)
				ok = false
			}
		}
	}
	return ok
}

// A syntax error of yaml.v3 has no type, only a text, and leaves out line 1. Errors of its parser (not those of its scanner)
// count lines from 0, and name the line on which the broken list or mapping begins, unless that is the first.
var (
	yamlError   = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)
	parserError = regexp.MustCompile(`^did not find expected (',' or|'-' indicator|key|node content|<)`)
)

func (s *source) reportSyntax(err error) {
	line, text := 1, err.Error()
	if m := yamlError.FindStringSubmatch(text); m != nil {
		text = m[2]
		n, err := strconv.Atoi(m[1])
		if err == nil {
			line = n
		}
		if parserError.MatchString(text) {
			if err == nil {
				line++
			}
			text += " (here, or further down in what begins here)"
		}
	}
	s.reportAt(line, "", "not YAML: %s", text)
}

// resolve follows aliases.
func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// mapping reads a section into a struct.
func (s *source) mapping(n *yaml.Node, v reflect.Value, path string) {
	s.visited[path] = true
	first := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], resolve(n.Content[i+1])
		if key.Kind != yaml.ScalarNode {
			s.reportAt(key.Line, path, "a key must be a plain name, is %s", describe(key))
			continue
		}
		field, ok := fieldByName(v.Type(), key.Value)
		p := join(path, key.Value)
		if !ok {
			s.reportAt(key.Line, p, "%s", unknown(v.Type(), path, key.Value))
			continue
		}
		if line, dup := first[key.Value]; dup {
			s.reportAt(key.Line, p, "set twice, first on line %d", line)
			continue
		}
		first[key.Value] = key.Line
		s.lines[p] = key.Line
		if value.ShortTag() == "!!null" {
			continue // as if it were not there
		}
		s.value(value, v.FieldByIndex(field.Index), p)
	}
	s.missing(v, path)
}

// missing reports the required fields of a section that the file leaves out.
func (s *source) missing(v reflect.Value, path string) {
	for field, value := range v.Fields() {
		p := join(path, field.Tag.Get("yaml"))
		_, named := s.lines[p]
		switch {
		case !field.IsExported() || s.bad[p] || s.visited[p]:
		case field.Type.Kind() == reflect.Struct:
			if need := required(field.Type, ""); len(need) > 0 {
				s.report(p, "is missing, it needs %s", strings.Join(need, ", "))
			}
		case !hasTag(field, "required") || !value.IsZero():
		case named:
			s.report(p, "must not be empty")
		default:
			s.report(p, "is missing")
		}
	}
}

// required lists the paths of the required fields of a section.
func required(t reflect.Type, path string) []string {
	var out []string
	for field := range t.Fields() {
		p := join(path, field.Tag.Get("yaml"))
		switch {
		case field.Type.Kind() == reflect.Struct:
			out = append(out, required(field.Type, p)...)
		case hasTag(field, "required"):
			out = append(out, p)
		}
	}
	return out
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	modeType     = reflect.TypeFor[route.Mode]()
	preferType   = reflect.TypeFor[route.Preference]()
)

// value reads one field.
func (s *source) value(n *yaml.Node, v reflect.Value, path string) {
	switch t := v.Type(); {
	case t == durationType:
		text, ok := s.text(n, path, "a duration such as 10s or 1m30s")
		if !ok {
			return
		}
		d, err := time.ParseDuration(text)
		if err != nil {
			s.reportAt(n.Line, path, "%q is not a duration such as 10s or 1m30s", text)
			return
		}
		v.SetInt(int64(d))
	case t == modeType:
		names := []string{route.Enabled.String(), route.ObserveOnly.String(), route.Disabled.String()}
		if text, ok := s.text(n, path, "one of "+strings.Join(names, ", ")); ok && s.oneOf(path, text, names...) {
			v.SetUint(uint64(route.ParseMode(text)))
		}
	case t == preferType:
		names := []string{route.PreferLocal.String(), route.PreferNewest.String(), route.PreferOldest.String()}
		if text, ok := s.text(n, path, "one of "+strings.Join(names, ", ")); ok && s.oneOf(path, text, names...) {
			p, _ := route.ParsePreference(text)
			v.SetUint(uint64(p))
		}
	case t.Kind() == reflect.Struct:
		if n.Kind != yaml.MappingNode {
			s.reportAt(n.Line, path, "must be a section with fields of its own, is %s", describe(n))
			return
		}
		s.mapping(n, v, path)
	case t.Kind() == reflect.String:
		if text, ok := s.text(n, path, "a string"); ok {
			v.SetString(text)
		}
	case t.Kind() == reflect.Bool:
		if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!bool" {
			s.reportAt(n.Line, path, "must be true or false, is %s", describe(n))
			return
		}
		v.SetBool(strings.EqualFold(n.Value, "true"))
	case t.Kind() == reflect.Int:
		var i int
		if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" || n.Decode(&i) != nil {
			s.reportAt(n.Line, path, "must be a whole number, is %s", describe(n))
			return
		}
		v.SetInt(int64(i))
	case t.Kind() == reflect.Slice:
		s.list(n, v, path)
	case t.Kind() == reflect.Map:
		s.stringMap(n, v, path)
	default:
		panic(fmt.Sprintf("config: field %s has the type %s, which decode does not know", path, t))
	}
}

func (s *source) list(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind != yaml.SequenceNode {
		s.reportAt(n.Line, path, "must be a list, is %s", describe(n))
		return
	}
	out := make([]string, 0, len(n.Content))
	for i, item := range n.Content {
		p := fmt.Sprintf("%s[%d]", path, i)
		s.lines[p] = item.Line
		text, ok := s.text(resolve(item), p, "a string")
		if ok && text == "" {
			s.report(p, "must not be empty")
		}
		out = append(out, text) // the empty one too, so that later items keep their index
	}
	v.Set(reflect.ValueOf(out))
}

func (s *source) stringMap(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind != yaml.MappingNode {
		s.reportAt(n.Line, path, "must be a mapping, is %s", describe(n))
		return
	}
	out := make(map[string]string, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, item := n.Content[i], resolve(n.Content[i+1])
		name, ok := s.text(key, path, "a mapping of strings")
		if !ok {
			continue
		}
		p := path + "[" + name + "]"
		if line, dup := s.lines[p]; dup {
			s.reportAt(key.Line, p, "set twice, first on line %d", line)
			continue
		}
		s.lines[p] = key.Line
		text, ok := s.text(item, p, "a string")
		if ok && text == "" {
			s.report(p, "must not be empty")
		}
		out[name] = text
	}
	v.Set(reflect.ValueOf(out))
}

// text reads a string. Numbers and the like are refused, not converted: 1.10 would become 1.1.
func (s *source) text(n *yaml.Node, path, want string) (string, bool) {
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" {
		return n.Value, true
	}
	hint := ""
	if n.Kind == yaml.ScalarNode && n.ShortTag() != "!!null" && want == "a string" {
		hint = "; put it in quotes"
	}
	s.reportAt(n.Line, path, "must be %s, is %s%s", want, describe(n), hint)
	return "", false
}

// describe says what a node is, for the second half of "must be X, is Y".
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	default: // a scalar, told apart by its tag
	}
	switch tag := n.ShortTag(); tag {
	case "!!null":
		return "empty"
	case "!!str":
		return fmt.Sprintf("the string %q", n.Value)
	case "!!int", "!!float":
		return "the number " + n.Value
	case "!!bool":
		return n.Value
	case "!!timestamp":
		return "the date " + n.Value
	default:
		return "a value of type " + tag
	}
}

func fieldByName(t reflect.Type, name string) (reflect.StructField, bool) {
	for f := range t.Fields() {
		if f.IsExported() && f.Tag.Get("yaml") == name {
			return f, true
		}
	}
	return reflect.StructField{}, false
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
