// The generator of ../criteo in Go: a line of Kaggle's display advertising format to a line of MultiSlot text.
// Build: go build -o criteo-go criteo.go
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
)

const numIntegers, numCategories = 13, 26

// float writes a number as the job reads it: the shortest digits of its nearest float32, which Python writes, too.
func float(value float64) string {
	text := strconv.FormatFloat(float64(float32(value)), 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}

// An integer as a dense value and as a feature id; both are kept, as few integers are many of the fields.
type integer struct{ dense, step string }

var known = map[string]integer{"": {"0.0", "0"}}

func integerOf(text []byte) (integer, error) {
	if found, ok := known[string(text)]; ok {
		return found, nil
	}
	value, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return integer{}, err
	}
	step := value + 4
	if value >= 3 {
		log := math.Log(float64(value))
		step = int64(log*log) + 7
	}
	found := integer{float(math.Log1p(float64(max(value, 0)))), strconv.FormatInt(max(1, step), 10)}
	known[string(text)] = found
	return found, nil
}

// appendSample appends the sample of an event: each slot in the order of the job file, as its length and its values.
func appendSample(out []byte, fields [][]byte) ([]byte, error) {
	if len(fields) != 1+numIntegers+numCategories {
		return out, fmt.Errorf("%d fields instead of %d", len(fields), 1+numIntegers+numCategories)
	}
	label, err := strconv.ParseFloat(string(fields[0]), 64)
	if err != nil {
		return out, err
	}
	var integers [numIntegers]integer
	out = append(out, "13"...)
	for number := range integers {
		if integers[number], err = integerOf(fields[1+number]); err != nil {
			return out, err
		}
		out = append(append(out, ' '), integers[number].dense...)
	}
	for _, text := range fields[1+numIntegers:] {
		if len(text) == 0 {
			out = append(out, " 0"...)
			continue
		}
		sign, err := strconv.ParseUint(string(text), 16, 64)
		if err != nil {
			return out, err
		}
		out = strconv.AppendUint(append(out, " 1 "...), sign, 10)
	}
	for _, each := range integers {
		out = append(append(out, " 1 "...), each.step...)
	}
	return append(append(out, " 1 "...), float(label)...), nil
}

func main() {
	events := bufio.NewScanner(os.Stdin)
	events.Buffer(make([]byte, 1<<20), 16<<20)
	samples := bufio.NewWriterSize(os.Stdout, 1<<20)
	var line []byte
	for events.Scan() {
		var err error
		line, err = appendSample(line[:0], bytes.Split(bytes.TrimRight(events.Bytes(), "\r"), []byte{'\t'}))
		if err != nil { // the event is rejected, with this reason
			line = append(line[:0], "! "+err.Error()...)
		}
		samples.Write(append(line, '\n'))
	}
	if samples.Flush() != nil || events.Err() != nil {
		os.Exit(1)
	}
}
