// A consumer of shop/orders-view: pull, work and commit in one transaction.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log"
	"os"

	_ "github.com/lib/pq"
)

type event struct {
	id      string
	payload []byte
}

type order struct {
	Number int `json:"number"`
}

func main() {
	db, err := sql.Open("postgres", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	for {
		found, err := handleBatch(context.Background(), db)
		if err != nil {
			log.Fatal(err)
		}
		if !found {
			return
		}
	}
}

// handleBatch is one transaction: effects and progress commit together, or not at all.
func handleBatch(ctx context.Context, db *sql.DB) (bool, error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	defer tx.Rollback()
	events, err := pull(ctx, tx)
	if err != nil {
		return false, err
	}
	for _, e := range events {
		if err := project(ctx, tx, e); err != nil {
			tx.Rollback()
			_, refused := db.ExecContext(ctx, "select mailboat.refuse('shop/orders-view', $1, $2)", e.id, err.Error())
			return true, refused
		}
	}
	return len(events) > 0, tx.Commit()
}

func pull(ctx context.Context, tx *sql.Tx) ([]event, error) {
	rows, err := tx.QueryContext(ctx, "select event_id, payload from mailboat.pull('shop/orders-view', 100)")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var events []event
	for rows.Next() {
		var e event
		if err := rows.Scan(&e.id, &e.payload); err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	return events, rows.Err()
}

func project(ctx context.Context, tx *sql.Tx, e event) error {
	var o order
	if err := json.Unmarshal(e.payload, &o); err != nil {
		return err
	}
	if o.Number < 0 {
		return fmt.Errorf("number %d is negative", o.Number)
	}
	_, err := tx.ExecContext(ctx, "insert into orders_view (event_id, number) values ($1, $2)", e.id, o.Number)
	return err
}
