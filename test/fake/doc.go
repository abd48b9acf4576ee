// Package fake is a recording kube-apiserver for tests of whole nodes. It does what a node needs of an apiserver (discovery, readiness,
// reviews, lists and watches of CRDs and APIServices), and answers every request that carries a case ID (HeaderCase) by the script of
// that case, after it has recorded what exactly arrived. It refuses to be clever: it has no storage and no routes of its own.
//
// A Server runs the goroutines of one http.Server, which end with Close.
//
//	ex := server.Begin("case-1", fake.Script{Status: 200})
//	// send a request with the header X-Case: case-1
//	arrived, problems := ex.Finish()
package fake
