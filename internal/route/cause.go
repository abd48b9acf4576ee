package route

// Cause says why mvp-node itself could not have a request answered. One list serves the Status body, the gRPC status detail,
// the metrics label and the audit annotation (DESIGN.md "Causes"); each name is spelled once, in String.
type Cause uint8

// The causes. CauseNone means that no error was made by mvp-node.
const (
	CauseNone Cause = iota
	ViewIncomplete
	NoPeerAvailable
	PeerTLS
	BreakerOpen
	PeerRefused
	NotServed
	LoopDetected
	LocalUnavailable
	AuthnUnavailable
	PeerBusy
	UserShare
	DeadlineBeforeDispatch
	OutcomeUnknown
	AssertionDenied
	BadAnswer
	causeEnd
)

var causeNames = [...]string{
	CauseNone:              "",
	ViewIncomplete:         "ViewIncomplete",
	NoPeerAvailable:        "NoPeerAvailable",
	PeerTLS:                "PeerTLS",
	BreakerOpen:            "BreakerOpen",
	PeerRefused:            "PeerRefused",
	NotServed:              "NotServed",
	LoopDetected:           "LoopDetected",
	LocalUnavailable:       "LocalUnavailable",
	AuthnUnavailable:       "AuthnUnavailable",
	PeerBusy:               "PeerBusy",
	UserShare:              "UserShare",
	DeadlineBeforeDispatch: "DeadlineBeforeDispatch",
	OutcomeUnknown:         "OutcomeUnknown",
	AssertionDenied:        "AssertionDenied",
	BadAnswer:              "BadAnswer",
}

// Causes lists every cause but CauseNone, in declaration order; tests of the error tables visit each.
func Causes() []Cause {
	out := make([]Cause, 0, causeEnd-1)
	for c := CauseNone + 1; c < causeEnd; c++ {
		out = append(out, c)
	}
	return out
}

// ParseCause is the inverse of String; a name it does not know is CauseNone.
func ParseCause(name string) Cause {
	for c, n := range causeNames {
		if n == name {
			return Cause(c)
		}
	}
	return CauseNone
}

// String is the name that clients, operators and dashboards see.
func (c Cause) String() string {
	if int(c) < len(causeNames) {
		return causeNames[c]
	}
	return "Unknown"
}
