"""Paths of the HTTP interface, as clients write them."""

GET_BALANCE = "/api/customers.getBalance"
ADD_FUNDS = "/api/balance.addFunds"
